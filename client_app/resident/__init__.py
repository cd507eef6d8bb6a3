"""The site's resident worker: model, tokenizer and rows stay loaded from one message to the next.

    flwr-clientapp (one process a message)          worker (one process a site)
    client_app.app -> client.ask --- Unix socket --> worker -> client_app.service.Service

`client` and `wire` import neither torch nor Flower; `worker` imports no Flower; `site` is the only module here
that knows Flower, and the only one of the project that uses its internals.
"""
