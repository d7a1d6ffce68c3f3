"""The Tinker API, as the official SDK calls it; one module of routes for each part of it."""
