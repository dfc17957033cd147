from deploy.cli.main import main

raise SystemExit(main())
