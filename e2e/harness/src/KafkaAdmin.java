import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Properties;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.NewPartitions;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.admin.RecordsToDelete;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.StringSerializer;

/** Changes of a topic that only its administrator makes, and transactions. For tests. */
public final class KafkaAdmin {
    public static void main(String[] arguments) throws Exception {
        String address = arguments[0], command = arguments[1], topic = arguments[2];
        Properties settings = new Properties();
        settings.put("bootstrap.servers", address);
        if (command.equals("write")) {
            write(settings, topic, Integer.parseInt(arguments[3]));
            return;
        }
        try (Admin admin = Admin.create(settings)) {
            switch (command) {
                case "partitions" -> {
                    int count = Integer.parseInt(arguments[3]);
                    admin.createPartitions(Map.of(topic, NewPartitions.increaseTo(count))).all().get();
                }
                case "delete-records" -> {
                    TopicPartition partition = new TopicPartition(topic, Integer.parseInt(arguments[3]));
                    RecordsToDelete before = RecordsToDelete.beforeOffset(Long.parseLong(arguments[4]));
                    admin.deleteRecords(Map.of(partition, before)).all().get();
                }
                case "delete" -> admin.deleteTopics(List.of(topic)).all().get();
                case "compacted" -> {
                    NewTopic created = new NewTopic(topic, Optional.of(1), Optional.empty());
                    created.configs(Map.of("cleanup.policy", "compact", "segment.ms", "100",
                        "min.cleanable.dirty.ratio", "0.001", "delete.retention.ms", "100"));
                    admin.createTopics(List.of(created)).all().get();
                }
                default -> throw new IllegalArgumentException(command);
            }
        }
    }

    /**
     * Writes the lines of standard input to a partition, and obeys the others: `begin` a transaction,
     * `commit` it, or `abort` it. A line with a tab has a key before it. Answers each command with a line.
     */
    private static void write(Properties settings, String topic, int partition) throws Exception {
        settings.put("transactional.id", "test-" + topic + "-" + partition);
        settings.put("transaction.timeout.ms", "600000");
        try (KafkaProducer<String, String> producer =
                new KafkaProducer<>(settings, new StringSerializer(), new StringSerializer())) {
            producer.initTransactions();
            BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
            for (String line = lines.readLine(); line != null; line = lines.readLine()) {
                switch (line) {
                    case "begin" -> producer.beginTransaction();
                    case "commit" -> producer.commitTransaction();
                    case "abort" -> producer.abortTransaction();
                    case "flush" -> producer.flush();
                    default -> {
                        int tab = line.indexOf('\t');
                        String key = tab < 0 ? null : line.substring(0, tab);
                        producer.send(new ProducerRecord<>(topic, partition, key, line.substring(tab + 1)));
                        continue;
                    }
                }
                System.out.println(line);
                System.out.flush();
            }
        }
    }
}
