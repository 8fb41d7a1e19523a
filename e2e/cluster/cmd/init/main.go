// Command init is the first process of a PID namespace. It reaps orphans and ends on a signal.
//
// It serves twice. In the cluster's own namespaces its end makes the kernel end every other
// process. In each pod it is the sandbox container, which Kubernetes calls "pause".
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
