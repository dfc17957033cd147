from gpu_worker.engine.quantizing.process import main

main()
