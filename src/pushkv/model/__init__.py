"""A pure model of network, transport and block memory, with faults as data.

`faults` says what goes wrong; `network` moves messages, `flights`, `writes` and `fates` move
bytes, and `blocks` says where they may go. All state is frozen and hashable, and every transition
is a pure function, so that one model drives exhaustive search, virtual time and the in-process
transport.
"""
