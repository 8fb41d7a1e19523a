# Sets a node's namespaces up, from inside: its address, the routes to the other nodes' pods, and
# /run and /var in memory.
set -eu
for folder in /run /var; do mount -t tmpfs -o mode=755 tmpfs "$folder"; done
mkdir -p /var/lib /var/log
ln -s /run /var/run
ip link set lo up
ip address add "$ADDRESS/24" dev eth0
ip link set eth0 up
ip route add default via "$CONTROL_PLANE"
for route in $ROUTES; do ip route add "${route%=*}" via "${route#*=}"; done
# Pods on faked nodes have no processes. The node refuses connections to them at once. An
# unreachable route would answer each caller only once a second, and the other calls would wait.
ip route add local 198.19.0.0/16 dev lo
echo 1 >/proc/sys/net/ipv4/ip_forward
