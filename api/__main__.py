from api.server import main

main()
