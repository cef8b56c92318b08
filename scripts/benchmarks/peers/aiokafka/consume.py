"""aiokafka, one record at a time: prints the seconds from the first record to the last.

python consume.py BOOTSTRAP TOPIC GROUP RECORDS
"""

import asyncio
import sys
import time

from aiokafka import AIOKafkaConsumer


async def main(bootstrap: str, topic: str, group: str, records: int) -> float:
    consumer = AIOKafkaConsumer(
        topic, bootstrap_servers=bootstrap, group_id=group, auto_offset_reset="earliest", max_poll_records=2_000
    )
    await consumer.start()
    done, first = 0, 0.0
    async for record in consumer:
        first = first or time.monotonic()
        assert record.offset >= 0
        done += 1
        if done == records:
            break
    took_s = time.monotonic() - first
    await consumer.stop()
    return took_s


print(asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))))
