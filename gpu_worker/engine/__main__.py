from gpu_worker.engine.process import main

main()
