#!/bin/sh
# usage: rootfs.sh PROGRAM FOLDER
# Fills FOLDER with the content of an image: the program without debug information, the shared
# libraries that it links, the certificates of public authorities, and an unprivileged user.
set -eu
program=$1
root=$2
mkdir -p "$root/usr/local/bin" "$root/etc/ssl/certs" "$root/tmp"
chmod 1777 "$root/tmp"
strip --strip-debug -o "$root/usr/local/bin/${program##*/}" "$program"
ldd "$program" | grep -o '/[^ )]*' | while read -r library; do
    mkdir -p "$root${library%/*}"
    cp -L "$library" "$root$library"
done
cp -L /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
echo 'rectrain:x:65532:65532::/:/sbin/nologin' >"$root/etc/passwd"
echo 'rectrain:x:65532:' >"$root/etc/group"
echo 'hosts: files dns' >"$root/etc/nsswitch.conf"
