module bench

go 1.21

require github.com/obsidiandynamics/goharvest v0.3.1

require (
	github.com/confluentinc/confluent-kafka-go v1.5.2 // indirect
	github.com/davecgh/go-spew v1.1.1 // indirect
	github.com/go-ozzo/ozzo-validation v3.6.0+incompatible // indirect
	github.com/google/uuid v1.1.1 // indirect
	github.com/lib/pq v1.5.1 // indirect
	github.com/obsidiandynamics/goneli v0.4.3 // indirect
	github.com/obsidiandynamics/libstdgo v0.4.1 // indirect
	github.com/pmezard/go-difflib v1.0.0 // indirect
	github.com/stretchr/testify v1.5.1 // indirect
	gopkg.in/confluentinc/confluent-kafka-go.v1 v1.5.2 // indirect
	gopkg.in/yaml.v2 v2.2.8 // indirect
)
