#!/bin/sh
# Installs the services that the tests start by themselves, from the packages of Debian or Ubuntu. None is left running.
# Where a container engine answers, it makes an image for the tests of containers (image.sh).
set -eu
packages="redis-server postgresql pgbouncer mariadb-server zookeeper default-jdk-headless libcurator-recipes-java
iproute2 iptables util-linux busybox-static"
sudo=
test "$(id -u)" = 0 || sudo=sudo
export DEBIAN_FRONTEND=noninteractive
$sudo apt-get update -qq
# The packages would start their services. The tests start servers of their own.
if ! test -e /usr/sbin/policy-rc.d; then
  printf '#!/bin/sh\nexit 101\n' | $sudo tee /usr/sbin/policy-rc.d >/dev/null
  $sudo chmod +x /usr/sbin/policy-rc.d
  trap '$sudo rm -f /usr/sbin/policy-rc.d' EXIT
fi
# shellcheck disable=SC2086
$sudo apt-get install -y -qq --no-install-recommends $packages >/dev/null
"$(dirname "$0")/image.sh"
