# Sets the control plane's namespaces up, from inside. A bridge connects the nodes and the machine.
# /run and /var are in memory, so that nothing stays on the machine's disk.
set -eu
for folder in /run /var; do mount -t tmpfs -o mode=755 tmpfs "$folder"; done
mkdir -p /var/lib /var/log
ip link set lo up
ip link add nodes type bridge
ip link set uplink master nodes up
ip address add "$CONTROL_PLANE/24" dev nodes
ip link set nodes up
