// Reads compose files as `docker compose config` does: names of fields, their types, and what refers to what. Prints the
// services with what each waits for, one a line.
package main

import (
	"context"
	"fmt"
	"os"
	"sort"
	"strings"

	"github.com/compose-spec/compose-go/v2/cli"
)

func main() {
	options, err := cli.NewProjectOptions(os.Args[1:], cli.WithName("check"), cli.WithResolvedPaths(true))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	project, err := options.LoadProject(context.Background())
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	names := project.ServiceNames()
	sort.Strings(names)
	for _, name := range names {
		service := project.Services[name]
		var waits []string
		for other, condition := range service.DependsOn {
			waits = append(waits, other+" "+condition.Condition)
		}
		sort.Strings(waits)
		fmt.Printf("%s: %s\n", name, strings.Join(waits, ", "))
		for _, volume := range service.Volumes {
			if volume.Type == "bind" {
				if _, err := os.Stat(volume.Source); err != nil {
					fmt.Fprintln(os.Stderr, err)
					os.Exit(1)
				}
			}
		}
	}
}
