"""The services of the ring, one package each. No service imports another."""
