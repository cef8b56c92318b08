// Confluent's Parallel Consumer: handles records of different keys at once, and prints how long that took.
//
//   java -cp 'jars/*' Parallel.java BOOTSTRAP TOPIC GROUP RECORDS AT_ONCE WAIT_MS

import io.confluent.parallelconsumer.ParallelConsumerOptions;
import io.confluent.parallelconsumer.ParallelConsumerOptions.ProcessingOrder;
import io.confluent.parallelconsumer.ParallelStreamProcessor;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;

public class Parallel {
    public static void main(String[] given) throws Exception {
        long records = Long.parseLong(given[3]);
        long waitMs = Long.parseLong(given[5]);
        var client = new KafkaConsumer<byte[], byte[]>(
            Map.of(
                "bootstrap.servers", given[0], "group.id", given[2], "auto.offset.reset", "earliest",
                "enable.auto.commit", "false"),
            new ByteArrayDeserializer(), new ByteArrayDeserializer());
        var options = ParallelConsumerOptions.<byte[], byte[]>builder()
            .ordering(ProcessingOrder.KEY).maxConcurrency(Integer.parseInt(given[4])).consumer(client).build();
        var processor = ParallelStreamProcessor.<byte[], byte[]>createEosStreamProcessor(options);
        var count = new AtomicLong();
        var first = new AtomicLong();
        var all = new CountDownLatch(1);
        processor.subscribe(List.of(given[1]));
        processor.poll(context -> {
            first.compareAndSet(0, System.nanoTime());
            if (waitMs > 0) {
                try {
                    Thread.sleep(waitMs);
                } catch (InterruptedException ended) {
                    Thread.currentThread().interrupt();
                }
            }
            if (count.incrementAndGet() == records) {
                all.countDown();
            }
        });
        all.await();
        System.out.println((System.nanoTime() - first.get()) / 1e9);
        System.exit(0);
    }
}
