"""Runs a command, and prints the last line of its output, which is JSON, with the figures of its process:

    python measured.py COMMAND [ARGUMENT …]

`processSeconds` is the time from the start of the process to its end. `peakBytes` is its largest resident memory. If
it has worker processes, that is the memory of the largest process, not their sum. `pageFaults` counts the faults of
all of them that needed no disk. A command that fails prints its own errors, and its status is passed on."""

import json
import os
import subprocess
import sys
import time


def main():
    begin = time.perf_counter()
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    printed = child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - begin
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != 0:
        sys.exit(f"{sys.argv[1]} ended with status {child.returncode}")
    lines = printed.decode().strip().splitlines()
    if not lines:
        sys.exit(f"{sys.argv[1]} printed nothing; expected a line of JSON")
    # Linux reports the memory in KiB.
    figures = {"processSeconds": seconds, "peakBytes": usage.ru_maxrss * 1024, "pageFaults": usage.ru_minflt}
    print(json.dumps(json.loads(lines[-1]) | figures))


if __name__ == "__main__":
    main()
