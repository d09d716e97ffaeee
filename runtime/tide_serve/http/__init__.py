"""HTTP: connections, the server's socket and end, and the middlewares around the routes."""
