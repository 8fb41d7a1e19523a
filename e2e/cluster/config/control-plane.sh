# The control plane's namespaces, from within: a bridge that the nodes and the machine are plugged into, and folders of its own
# in memory, so that nothing is left on the machine's disk.
set -eu
for folder in /run /var; do mount -t tmpfs -o mode=755 tmpfs "$folder"; done
mkdir -p /var/lib /var/log
ip link set lo up
ip link add nodes type bridge
ip link set uplink master nodes up
ip address add "$CONTROL_PLANE/24" dev nodes
ip link set nodes up
