"""`blockyard simulate`: runs the scheduler on a trace in virtual time, with workers that compute nothing."""
