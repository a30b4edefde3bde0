"""Web application: routes, streams, accounts, settings, command line."""
