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
# Pods of nodes that are faked are nowhere, and whoever calls one is told so at once.
ip route add unreachable 198.19.0.0/16
echo 1 >/proc/sys/net/ipv4/ip_forward
