from batcher.process import main

main()
