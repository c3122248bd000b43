"""The demo model in a process that stores wrong rows (`error_oracle.plant`), with a host tier of any size."""
