# A node's namespaces, from within: its address, the way to the other nodes' pods, and folders of its own in memory.
set -eu
for folder in /run /var; do mount -t tmpfs -o mode=755 tmpfs "$folder"; done
mkdir -p /var/lib /var/log
ln -s /run /var/run
ip link set lo up
ip address add "$ADDRESS/24" dev eth0
ip link set eth0 up
ip route add default via "$CONTROL_PLANE"
for route in $ROUTES; do ip route add "${route%=*}" via "${route#*=}"; done
# Pods of nodes that are faked have no processes: the node refuses whoever calls one, at once. (An unreachable route would tell each caller
# once a second only, and all others would wait.)
ip route add local 198.19.0.0/16 dev lo
echo 1 >/proc/sys/net/ipv4/ip_forward
