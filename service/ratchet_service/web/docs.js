// A file of its own, since the page's Content-Security-Policy runs no script that stands in the page. validatorUrl: without it
// Swagger UI sends the address of the description to a validator of its makers.
SwaggerUIBundle({ url: "openapi.json", dom_id: "#api", validatorUrl: null, deepLinking: true, docExpansion: "none" });
