"""One frozen struct a service. Each module is imported by its service, by the resolver and by the launcher."""
