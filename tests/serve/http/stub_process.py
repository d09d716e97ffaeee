"""`stub_server`'s routes as ``tide-serve`` runs them, in a process of its own: prints its address, then serves until a signal.

python -m serve.http.stub_process DRAIN_TIMEOUT NAME
"""

import sys
from functools import partial

from serve.http.stub_server import Seen, stub_app, stub_service
from tide_serve import ServeConfig
from tide_serve.http.middlewares import guard
from tide_serve.http.server import bound_socket, inherited_socket, run_server, url_of
from tide_serve.observe.logs import log_to_stderr

if __name__ == "__main__":
    service = stub_service(ServeConfig(model_names=(sys.argv[2],), drain_timeout=float(sys.argv[1])))
    listener = inherited_socket() or bound_socket("127.0.0.1", 0)
    log_to_stderr(log_text=False)
    app = guard(stub_app(service, Seen()), service)
    run_server(app, service, listener, listening=partial(print, url_of(listener, tls=False), flush=True))
