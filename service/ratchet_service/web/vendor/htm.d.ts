/** htm: templates that call ``this`` as ``h(type, props, ...children)``. */
declare const htm: { bind(h: (type: unknown, props: object | null, ...children: unknown[]) => unknown): (strings: TemplateStringsArray, ...values: any[]) => any };
export default htm;
