"""``jevany-admin``: adds models to a repository and fetches what they need."""
