"""/metrics in Prometheus' text format.

`scrape.Metrics` collects: it asks the other gateways for their counters, sums them, and adds the counters of schedulers
and workers. `exposition` writes the metric families that `shared/ring_client/metrics/metric_families.py` declares.
"""
