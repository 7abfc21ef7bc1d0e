"""Two hosts on one machine: network namespaces joined by a cable of limited rate, a trainer in one, a rollout in the
other."""
