"""/metrics: counters of all gateways, summed, and those of the other members, in Prometheus' text format."""
