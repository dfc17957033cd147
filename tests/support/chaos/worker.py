"""Worker process whose engine has no model: the real agent over `tests.support.chaos.engine`."""

from gpu_worker import process
from gpu_worker.agent import engine_client

engine_client.ENGINE_MODULE = "tests.support.chaos.engine"
process.main()
