"""The endpoints, one module for each part of the API."""
