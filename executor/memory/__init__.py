"""Host memory that a device copies to and from."""
