"""The load test: panels against a running server, serial or under load, compared with the published numbers."""
