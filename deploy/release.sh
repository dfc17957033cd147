#!/bin/sh
# What a release is made of (.github/workflows/release.yml).
#   release.sh version TAG     prints version=X, if the tag is that of pyproject.toml's version
#   release.sh files FOLDER    makes the wheel, and the archive of the stack: docker-compose.yml, what it mounts or may be given, and a file .env that names
#                              the images of this version under REGISTRY (default: ghcr.io and the owner of the repository)
set -eu
cd "$(dirname "$0")/.."
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)

case ${1:-} in
    version)
        [ "$2" = "v$version" ] || { echo "the tag is $2, but pyproject.toml's version is $version" >&2; exit 1; }
        echo "version=$version"
        ;;
    files)
        registry=${REGISTRY:-ghcr.io/${GITHUB_REPOSITORY_OWNER:?}}
        mkdir -p "$2"
        folder=$(cd "$2" && pwd)
        stack=tokenfleet-stack-$version
        place=$(mktemp -d)
        mkdir "$place/source"
        git archive HEAD | tar -x -C "$place/source"
        "${PYTHON:-python3}" -m pip wheel -q --no-deps ${PIP_FLAGS:-} -w "$folder" "$place/source"
        mkdir -p "$place/$stack/deploy"
        cp docker-compose.yml LICENSE "$place/$stack/"
        cp -R deploy/Caddyfile deploy/grafana deploy/prometheus deploy/redis_entry.sh deploy/redis_admin.sh deploy/make_secrets.sh \
            deploy/users.acl deploy/several_machines.yml "$place/$stack/deploy/"
        for image in TOKENFLEET_IMAGE=tokenfleet TOKENFLEET_WORKER_IMAGE=tokenfleet-worker TOKENFLEET_WORKER_CPU_IMAGE=tokenfleet-worker-cpu; do
            echo "${image%%=*}=$registry/${image#*=}:$version"
        done >"$place/$stack/.env"
        tar -C "$place" --sort=name --owner=0 --group=0 --numeric-owner --mtime=@315532800 -czf "$folder/$stack.tar.gz" "$stack"
        rm -r "$place"
        (cd "$folder" && sha256sum ./*.whl ./*.tar.gz >SHA256SUMS)
        ;;
    *) sed -n '2,5s/^# \{0,1\}//p' "$0" >&2; exit 64 ;;
esac
