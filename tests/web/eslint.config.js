import js from "@eslint/js";
import globals from "globals";

export default [
  js.configs.recommended,
  {
    languageOptions: { ecmaVersion: 2023, sourceType: "module", globals: { ...globals.browser, ...globals.node } },
    rules: {
      eqeqeq: "error", "no-var": "error", "prefer-const": "error", "no-implied-eval": "error", "no-eval": "error",
      "no-restricted-properties": ["error", { property: "innerHTML" }, { property: "outerHTML" }, { property: "insertAdjacentHTML" }],
      "no-restricted-syntax": ["error", { selector: "Identifier[name='dangerouslySetInnerHTML']", message: "Everything that a job wrote is text." }],
    },
  },
  { ignores: ["node_modules/", "**/vendor/"] },
];
