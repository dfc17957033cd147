"""Worker process whose engine records its steps (tests.support.runahead.recorded_engine.py)."""

from gpu_worker import process
from gpu_worker.agent import engine_client

engine_client.ENGINE_MODULE = "tests.support.runahead.recorded_engine"
process.main()
