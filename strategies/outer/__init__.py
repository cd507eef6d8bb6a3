"""Outer rules of low-communication training: what the server makes of the changes of sites that trained for long.

    fedavg                       strategies.fedavg, server.optimizer = "none"
    nesterov, fedadam, fedyogi   strategies.aggregation.outer, server.optimizer of that name
    solo                         a round of one site (server.solo)
    sparseloco                   error feedback at the sites in the place of outer momentum
    streaming                    fragments of the model in turn, with overlap
    delayed                      asynchronous arrivals with delayed Nesterov, and DyLU
    rda                          merge by direction and mean length

Everywhere delta is local minus global, float arithmetic is float64 with one rounding at the store, and what a rule
remembers is in `state_dict`. A round without an accepted update changes nothing.
"""
