#!/bin/bash
# First boot: an ordinary user, its folders and nginx. Code, certificates and unit files are copied by the operator.
set -euo pipefail
apt-get update
apt-get install --yes --no-install-recommends nginx python3-venv
useradd --system --home-dir /var/lib/umbel --shell /usr/sbin/nologin umbel
install -d -o root -g umbel -m 0750 /etc/umbel
install -d -o umbel -g umbel -m 0700 /var/lib/umbel
python3 -m venv /opt/umbel
