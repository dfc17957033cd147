"""`python -P -m tests.support.forks FD`: a fork server that is asked through socket FD."""

import socket
import sys

from tests.support.forks.server import begin

begin(socket.socket(fileno=int(sys.argv[1])))
