#!/bin/sh
# image.sh [TAG PROGRAM]
#
# Makes a container image of a Redis or Valkey program of this machine, for machines where the official images are not at
# hand. Without arguments it does so only where redis:7-alpine is absent and cannot be pulled: TAG is then
# asynclock-test/redis:debian and PROGRAM Debian's redis-server. The image has no official name, so that nobody takes it
# for what it is not. Set ASYNCLOCK_TEST_IMAGE=TAG to use it.
set -eu
official=redis:7-alpine
limit=60 # seconds for a pull: a network that swallows packets does not answer at all
tag=${1:-asynclock-test/redis:debian}
server=${2:-/usr/bin/redis-server}

if ! timeout "$limit" docker version >/dev/null 2>&1; then
  echo "no container engine answers here: no image is made, and the tests of containers are skipped"
  exit 0
fi
if test $# = 0; then
  if docker image inspect "$official" >/dev/null 2>&1 || timeout "$limit" docker pull -q "$official" >/dev/null 2>&1; then
    echo "the image $official is here: ASYNCLOCK_TEST_IMAGE=$official uses it"
    exit 0
  fi
fi

root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
chmod 755 "$root"
mkdir -p "$root/bin" "$root/data" "$root/etc" "$root/proc" "$root/sys" "$root/tmp" "$root/usr/bin" "$root/usr/local/bin"
chmod 1777 "$root/tmp"
cp -L "$server" "$root/usr/bin/redis-server"
cp -L /usr/bin/redis-cli "$root/usr/bin/redis-cli"
ln -s redis-server "$root/usr/bin/redis-sentinel"
ldd "$server" /usr/bin/redis-cli | grep -o '/[^ :]*\.so[^ :]*' | sort -u | while read -r library; do
  mkdir -p "$root$(dirname "$library")"
  cp -L "$library" "$root$library"
done
cp /bin/busybox "$root/bin/busybox" # of busybox-static
/bin/busybox --list | grep -v busybox | while read -r applet; do ln -s busybox "$root/bin/$applet"; done
printf 'root:x:0:0:root:/root:/bin/sh\nredis:x:999:999::/data:/bin/false\n' >"$root/etc/passwd"
printf 'root:x:0:\nredis:x:999:\n' >"$root/etc/group"

# The official images are built with protected mode off by default, Debian's program with it on.
cat >"$root/usr/local/bin/redis-server" <<'SCRIPT'
#!/bin/sh
case "$#$*" in 1-v | 1--version | 1-h | 1--help | 1--check-system | *--protected-mode*) exec /usr/bin/redis-server "$@" ;; esac
case ${1-} in
  '' | --*) ;;
  *)
    if grep -qs '^ *protected-mode' "$1"; then exec /usr/bin/redis-server "$@"; fi
    file=$1
    shift
    ;;
esac
exec /usr/bin/redis-server ${file+"$file"} --protected-mode no "$@"
SCRIPT
# As in the official images: `docker run IMAGE --appendonly yes` gives options to the server, and a command replaces it.
cat >"$root/usr/local/bin/docker-entrypoint.sh" <<'SCRIPT'
#!/bin/sh
case ${1-} in -* | *.conf) set -- redis-server "$@" ;; esac
exec "$@"
SCRIPT
chmod 755 "$root/usr/local/bin/"*

tar -C "$root" --owner=0 --group=0 -c . | docker import \
  -c 'ENTRYPOINT ["docker-entrypoint.sh"]' -c 'CMD ["redis-server"]' -c 'WORKDIR /data' -c 'VOLUME /data' \
  -c 'EXPOSE 6379/tcp' - "$tag" >/dev/null
echo "made the image $tag of $server: ASYNCLOCK_TEST_IMAGE=$tag uses it"
