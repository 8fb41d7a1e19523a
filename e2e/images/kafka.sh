#!/bin/sh
# usage: kafka.sh JAVA JARS FOLDER
# Fills FOLDER with the content of the image of Kafka: the installation that the program JAVA
# belongs to, without sources, Kafka's jars, and the shared libraries that they need.
set -eu
java=$1
jars=$2
root=$3
home=${java%/bin/java}
mkdir -p "$root/opt/java/bin" "$root/opt/kafka" "$root/tmp" "$root/data"
chmod 1777 "$root/tmp" "$root/data"
cp -L "$java" "$root/opt/java/bin/"
cp -L "$jars"/*.jar "$root/opt/kafka/"
(cd "$home" && find -L conf lib -type f ! -name src.zip ! -name ct.sym) | while read -r file; do
    mkdir -p "$root/opt/java/${file%/*}"
    cp -L "$home/$file" "$root/opt/java/$file"
done
# Not the libraries for windows and sound, which need many others.
for library in bin/java lib/server/libjvm.so lib/libextnet.so lib/libjava.so lib/libjimage.so lib/libjli.so \
    lib/libmanagement.so lib/libmanagement_ext.so lib/libnet.so lib/libnio.so lib/libverify.so lib/libzip.so; do
    ldd "$home/$library"
done | grep -o '/[^ )]*' | sort -u | while read -r library; do
    case $library in "$home"/*) continue ;; esac
    mkdir -p "$root${library%/*}"
    cp -L "$library" "$root$library"
done
