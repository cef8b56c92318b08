"""Numbers and UUIDs that stand in a binary column, big-endian, as columns. Thin.

SQL reads bytes as a number by way of their hexadecimal digits alone, which cost more than everything else that is done
to a record. Java has a call for it, and code that Spark compiles can call Java: its own encoders of objects are made of
that. It is no public interface of Spark. So `reader` offers it where it is as known, and SQL elsewhere; a property test
holds the two equal. Neither needs anything on an executor but Spark.

The bytes have to be there: who asks beyond the end gets an error of Java's, or NULL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession

_UUID_GROUPS = ((0, 4), (4, 2), (6, 2), (8, 2), (10, 6))
_UNSIGNED_32 = 0xFFFF_FFFF


class Reader(Protocol):
    """Reads a column of bytes at a position that counts from 0."""

    def signed64(self, raw: Column, at: int) -> Column:
        """Eight bytes as bigint."""

    def unsigned32(self, raw: Column, at: int) -> Column:
        """Four bytes as bigint."""

    def uuid(self, raw: Column, at: int) -> Column:
        """Sixteen bytes as lower-case text with hyphens."""


def reader(spark: SparkSession) -> Reader:
    """The fastest one that this Spark has."""
    from py4j.protocol import Py4JError

    try:
        fast = JavaBytes(spark)
        fast.uuid(F.lit(bytes(16)), 0)
        fast.unsigned32(F.lit(bytes(16)), 0)
    except (Py4JError, TypeError, AttributeError, ImportError):
        return SqlBytes()
    return fast


class SqlBytes:
    """By functions of Spark SQL."""

    def signed64(self, raw: Column, at: int) -> Column:
        """A negative base makes `conv` read 64 bits as signed. try_: of a value that is too short nothing is left."""
        return F.conv(_hex(raw, at, 8), 16, -10).try_cast("bigint")

    def unsigned32(self, raw: Column, at: int) -> Column:
        """Fits `conv` as it is."""
        return F.conv(_hex(raw, at, 4), 16, 10).cast("bigint")

    def uuid(self, raw: Column, at: int) -> Column:
        """The five groups, one by one."""
        return F.lower(F.concat_ws("-", *(_hex(raw, at + first, size) for first, size in _UUID_GROUPS)))


class JavaBytes:
    """By java.nio.ByteBuffer and java.util.UUID, called from code that Spark compiles. Py4JError where it cannot."""

    def __init__(self, spark: SparkSession) -> None:
        from pyspark.sql.classic.column import Column as ClassicColumn

        # Nothing in the Java process has types here. Each name is asked for there, piece by piece: so once.
        jvm: Any = spark.sparkContext._jvm
        self._column = ClassicColumn
        self._utils = jvm.org.apache.spark.sql.classic.ExpressionUtils
        objects = jvm.org.apache.spark.sql.catalyst.expressions.objects
        self._static_call, self._call, self._new = objects.StaticInvoke, objects.Invoke, objects.NewInstance
        kinds = jvm.org.apache.spark.sql.types.DataTypes
        self._long_kind, self._int_kind, self._text_kind = kinds.LongType, kinds.IntegerType, kinds.StringType
        self._list, self._converters = jvm.java.util.ArrayList, jvm.scala.jdk.javaapi.CollectionConverters
        self._none, self._empty = jvm.scala.Option.empty(), self._sequence()
        find, kind = jvm.java.lang.Class.forName, jvm.org.apache.spark.sql.types.ObjectType
        self._buffer_class, self._uuid_class = find("java.nio.ByteBuffer"), find("java.util.UUID")
        self._text_class = find("org.apache.spark.unsafe.types.UTF8String")
        self._buffer, self._uuid, self._string = map(
            kind, (self._buffer_class, self._uuid_class, find("java.lang.String"))
        )

    def signed64(self, raw: Column, at: int) -> Column:
        """ByteBuffer.getLong."""
        return self._as_column(self._long(raw, at))

    def unsigned32(self, raw: Column, at: int) -> Column:
        """ByteBuffer.getInt, which is signed."""
        found = self._invoke(self._wrapped(raw), "getInt", self._int_kind, F.lit(at))
        return self._as_column(found).cast("bigint").bitwiseAND(F.lit(_UNSIGNED_32))

    def uuid(self, raw: Column, at: int) -> Column:
        """UUID.toString."""
        halves = self._sequence(self._long(raw, at), self._long(raw, at + 8))
        made = self._new(self._uuid_class, halves, self._empty, True, self._uuid, self._none)
        text = self._invoke(made, "toString", self._string)
        return self._as_column(self._static(self._text_class, self._text_kind, "fromString", text))

    def _long(self, raw: Column, at: int) -> Any:
        return self._invoke(self._wrapped(raw), "getLong", self._long_kind, F.lit(at))

    def _wrapped(self, raw: Column) -> Any:
        # Written out for each number, and made once for all of them: Spark computes equal expressions once.
        return self._static(self._buffer_class, self._buffer, "wrap", self._utils.expression(_java(raw)))

    def _static(self, owner: Any, kind: Any, method: str, argument: Any) -> Any:
        # NULL for NULL; may be NULL; the same for the same.
        given = self._sequence(argument)
        return self._static_call(owner, kind, method, given, self._empty, True, True, True, self._none)

    def _invoke(self, target: Any, method: str, kind: Any, *arguments: Column) -> Any:
        given = self._sequence(*(self._utils.expression(_java(one)) for one in arguments))
        return self._call(target, method, kind, given, self._empty, True, True, True)

    def _as_column(self, expression: Any) -> Column:
        return self._column(self._utils.column(expression))

    def _sequence(self, *items: Any) -> Any:
        found = self._list()
        for item in items:
            found.add(item)
        return self._converters.asScala(found).toSeq()


def _java(column: Any) -> Any:
    return column._jc


def _hex(raw: Column, at: int, size: int) -> Column:
    return F.hex(F.substring(raw, at + 1, size))  # SQL counts from 1
