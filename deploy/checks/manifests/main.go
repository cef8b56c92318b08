// Reads manifests on standard input and decodes each into the type that the API server decodes it into, strictly: a
// field that does not exist, is written twice or has another type is an error. One line for each object.
package main

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"os"

	monitoring "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	apps "k8s.io/api/apps/v1"
	batch "k8s.io/api/batch/v1"
	core "k8s.io/api/core/v1"
	networking "k8s.io/api/networking/v1"
	policy "k8s.io/api/policy/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/yaml"
	strict "sigs.k8s.io/yaml"
)

var kinds = map[string]func() any{
	"apps/v1 Deployment":                      func() any { return &apps.Deployment{} },
	"batch/v1 Job":                            func() any { return &batch.Job{} },
	"monitoring.coreos.com/v1 PrometheusRule": func() any { return &monitoring.PrometheusRule{} },
	"monitoring.coreos.com/v1 ServiceMonitor": func() any { return &monitoring.ServiceMonitor{} },
	"networking.k8s.io/v1 NetworkPolicy":      func() any { return &networking.NetworkPolicy{} },
	"policy/v1 PodDisruptionBudget":           func() any { return &policy.PodDisruptionBudget{} },
	"v1 ConfigMap":                            func() any { return &core.ConfigMap{} },
	"v1 Secret":                               func() any { return &core.Secret{} },
	"v1 Service":                              func() any { return &core.Service{} },
	"v1 ServiceAccount":                       func() any { return &core.ServiceAccount{} },
}

func main() {
	documents := yaml.NewYAMLReader(bufio.NewReader(os.Stdin))
	failed := false
	for {
		document, err := documents.Read()
		if err == io.EOF {
			break
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		if len(bytes.TrimSpace(document)) == 0 {
			continue
		}
		var object struct {
			meta.TypeMeta   `json:",inline"`
			meta.ObjectMeta `json:"metadata"`
		}
		if err := strict.Unmarshal(document, &object); err != nil {
			fmt.Println("error:", err)
			failed = true
			continue
		}
		if object.Kind == "" { // comments alone
			continue
		}
		kind := object.APIVersion + " " + object.Kind
		made, known := kinds[kind]
		if !known {
			fmt.Printf("error: %s %s: no type for it here\n", kind, object.Name)
			failed = true
			continue
		}
		if err := strict.UnmarshalStrict(document, made()); err != nil {
			fmt.Printf("error: %s %s: %v\n", kind, object.Name, err)
			failed = true
			continue
		}
		fmt.Printf("ok: %s %s\n", kind, object.Name)
	}
	if failed {
		os.Exit(1)
	}
}
