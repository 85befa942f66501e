"""What two or more services use: messages, links, configuration, logging."""
