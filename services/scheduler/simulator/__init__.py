"""`blockyard simulate`: the scheduler itself on a trace, with workers that cost time and compute nothing."""
