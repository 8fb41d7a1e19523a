// The first process of a PID namespace: it reaps what is orphaned there and waits for a signal to end. It serves twice:
// as the init of the cluster's own namespaces (when it ends, the kernel ends everything else in them) and as the sandbox
// container of each pod, where Kubernetes calls it "pause".
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, syscall.SIGCHLD, syscall.SIGINT, syscall.SIGTERM)
	for s := range signals {
		if s != syscall.SIGCHLD {
			return
		}
		for {
			if pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil); pid <= 0 && err != syscall.EINTR {
				break
			}
		}
	}
}
