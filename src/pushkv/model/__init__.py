"""A pure model of network, transport and block pool, with faults as data."""
