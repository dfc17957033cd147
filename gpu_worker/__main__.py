from gpu_worker.process import main

main()
