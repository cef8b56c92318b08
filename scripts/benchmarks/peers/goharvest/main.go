// Runs one goharvest until it is told to stop. Arguments: data source, bootstrap servers, leader group, name,
// and, as an option, marked records per query and records in flight.
package main

import (
	"os"
	"os/signal"
	"strconv"
	"syscall"

	"github.com/obsidiandynamics/goharvest"
)

func main() {
	config := goharvest.Config{
		BaseKafkaConfig:     goharvest.KafkaConfigMap{"bootstrap.servers": os.Args[2], "broker.address.family": "v4"},
		ProducerKafkaConfig: goharvest.KafkaConfigMap{},
		DataSource:          os.Args[1],
		OutboxTable:         "outbox",
		LeaderTopic:         os.Args[3] + ".neli",
		LeaderGroupID:       os.Args[3],
		Name:                os.Args[4],
	}
	if len(os.Args) > 6 {
		config.Limits.MarkQueryRecords = number(os.Args[5])
		config.Limits.MaxInFlightRecords = number(os.Args[6])
	}
	harvest, err := goharvest.New(config)
	check(err)
	check(harvest.Start())
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	go func() {
		<-signals
		harvest.Stop()
	}()
	check(harvest.Await())
}

func number(text string) *int {
	value, err := strconv.Atoi(text)
	check(err)
	return &value
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}
