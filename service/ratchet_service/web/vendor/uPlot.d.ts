/** uPlot as the chart uses it; its own types are larger than the pages. */
export default class uPlot {
  constructor(options: object, data: unknown, target: HTMLElement);
  [member: string]: any;
}
